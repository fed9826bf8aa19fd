"""The ground floor: what every room may import. It needs nothing but Python."""
