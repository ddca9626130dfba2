"""The HTTP front end of a running cluster: OpenAI's completions and chat completions, and SGLang's /generate."""
