"""het-plugin audit"""

if __name__ == '__main__':
  from het_plugin.__main__ import main

  main('audit')
