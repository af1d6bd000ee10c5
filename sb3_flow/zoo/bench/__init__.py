"""The bench: tasks x algorithms x seeds as independent, resumable runs, and the table over them."""
