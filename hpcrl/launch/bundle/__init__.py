"""`hpcrl bundle`: everything that a job reads, in one archive, for compute nodes without network and without a storm of
small files on a shared file system."""
