"""What a tenant may use and has used: budgets, meters, reservations, their answers' headers. Begin with `quota`."""
