"""What an open stack shows of itself: figures, the log for operators, the socket that serves both. Changes nothing."""
