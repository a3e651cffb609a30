"""What `cloudyard bench` measures: `measures` through the public SDK, `floors` without us, `report` puts it
in words."""
