/* Ends with what the proof of a level says. */
#include CHECKED_LEVEL

int main(void)
{
    return rz_prove();
}
