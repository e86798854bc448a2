"""What `import penstock` offers programs: runs and their logs, and the types of own parts.

To add a name: a line in `names.py`.
"""
