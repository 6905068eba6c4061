"""What every use case needs: the context, the clusters in use, login nodes, questions to them."""
