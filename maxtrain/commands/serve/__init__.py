"""`maxtrain serve`: the HTTP server with OpenAI's API."""
