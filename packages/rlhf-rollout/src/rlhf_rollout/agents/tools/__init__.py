"""Tools of the policy: functions and MCP servers, the calls in its answers, and the agent that runs them."""
