"""Which parts of a GPU stack go together: the published tables as data, and the resolver that reads them."""
