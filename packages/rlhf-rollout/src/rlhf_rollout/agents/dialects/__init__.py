"""The HTTP protocols that agents speak to the policy: OpenAI's two, Anthropic's, and what they have in common."""
