"""What several test files use: cases, the numpy reference, scripts as modules, ranks and kills."""
