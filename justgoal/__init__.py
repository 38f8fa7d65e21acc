"""Give a language model one operator and a goal of four sentences; judge what it makes of it."""

__version__ = "0.1.0"
