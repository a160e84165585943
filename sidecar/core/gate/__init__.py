"""Who is let in to an engine, and when: limits, classes' queues, turns, who has to make room. Begin with `admit`."""
