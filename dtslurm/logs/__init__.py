"""Convert log frames to lines, and lines to text for a screen. Pure functions and classes."""
