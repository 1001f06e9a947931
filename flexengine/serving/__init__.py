"""A model behind OpenAI's protocol, for trying it: requests as values, answers as JSON, HTTP around both."""
