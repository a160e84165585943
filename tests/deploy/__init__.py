"""What is deployed, checked without a cluster; `make test-deploy` runs it, nothing else does."""
