"""docs/howto/recipes, each page followed on machines of the test's own."""
