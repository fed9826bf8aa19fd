"""Colours and dashes of lines."""

from matplotlib import colors

from het_plugin.reporting import style


def contrast_on_white(color):
  """WCAG 2.1: (1 + 0.05) / (luminance + 0.05)."""
  linear = [
    x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in colors.to_rgb(color)
  ]
  red, green, blue = linear
  return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


def test_few_lines_can_be_read_on_white():
  styles = style.line_styles('abcdef')
  assert list(styles) == list('abcdef') and len(set(styles.values())) == 6
  assert all(contrast_on_white(color) >= 4.5 for color, _ in styles.values())


def test_many_lines_have_a_colour_each():
  styles = style.line_styles(map(str, range(40)))
  assert len({color for color, _ in styles.values()}) == 40
  assert style.line_styles([]) == {}
