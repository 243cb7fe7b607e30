"""Makes the tables of reports: arranges results in rows and columns, and formats them."""
