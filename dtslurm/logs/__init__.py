"""Log text: from frames to lines to what a screen shows. Pure."""
