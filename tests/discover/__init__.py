"""The conversion of a cluster's answers into the text of a profile."""
