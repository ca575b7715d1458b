"""The tests: a group a package, a law a test."""
