/* Which of the bugs that the sources were given is there: of those of `test_levels.py`, from 1 on; 0: none. */
static __attribute__((unused)) int planted;
