"""Virtual engines, faults and traffic, and the real request path among them: what a policy would have done."""
