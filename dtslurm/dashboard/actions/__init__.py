"""Actions of the dashboard: notifications, logs in external programs, reports, submissions, the demo."""
