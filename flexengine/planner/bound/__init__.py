"""The least seconds that any plan within the budgets could take."""
