"""Figures of the paper from any finished runs: runs -> a tidy frame -> a matplotlib figure.

frames.py makes the frames, which are also what is written to CSV; panels.py draws them; command.py is the command
`dispark figures`. A new figure is a function that makes a frame, a function that draws it, and a line in command.py.
"""
