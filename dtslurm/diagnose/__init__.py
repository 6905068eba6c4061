"""From what the ranks left behind to which failed first, and why: pure, no file is read here."""
