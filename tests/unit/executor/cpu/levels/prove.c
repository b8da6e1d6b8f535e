/* Ends with what the proof of a level says, with the bug that is asked for. */
#include <stdlib.h>

#include CHECKED_LEVEL

int main(int count, char **arguments)
{
    planted = count > 1 ? atoi(arguments[1]) : 0;
    return rz_prove();
}
