"""Describes plans and runs in words (plan_text), JSON and traces (plan_data), and HTML pages (plan_page, run_page)."""
