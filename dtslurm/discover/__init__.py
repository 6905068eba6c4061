"""From what a cluster tells of itself to a profile's text. Pure: answers in, text out."""
