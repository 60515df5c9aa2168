"""The cases of each op; tools/op_cases.py writes them to files."""
