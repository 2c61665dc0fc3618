"""Load on a server that speaks OpenAI's HTTP API: arrivals, an HTTP client, and what came back when."""
