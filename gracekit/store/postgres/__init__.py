"""The engine of PostgreSQL, its reader and its schema; only here psycopg is imported."""
