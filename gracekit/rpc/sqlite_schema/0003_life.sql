-- A connection is proven dead by the lock of the very file that it locked. A row of an older
-- gracekit names none: then the file of its name counts, which is drawn anew for each connection.
ALTER TABLE connection ADD COLUMN lock_file TEXT;    -- device:inode in hexadecimal digits
ALTER TABLE connection ADD COLUMN time_ns INTEGER;   -- inode of the time namespace of start_ticks
