"""Commands about the tool and the clusters instead of runs."""
