"""OpenAI's API over AsyncLLM: `effinfer serve`."""
