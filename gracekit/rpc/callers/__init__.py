"""How clients ask a service, and the client for code that is not async."""
