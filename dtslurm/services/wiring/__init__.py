"""What every use case needs: the context, the active clusters, login nodes, and queries to them."""
