"""Commands of operators beside a serving engine: replay, simulate, advise, bench, top, pages. The core imports none."""
