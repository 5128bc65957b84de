"""Messages between workflows, their durable state, and the activities that they call."""
