"""Cluster discovery: turns a cluster's answers into a cluster profile. Nothing is run here."""
