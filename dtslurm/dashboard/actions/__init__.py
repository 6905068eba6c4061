"""Actions of the dashboard: notifications, logs in other programs, reports, submissions, the demo."""
