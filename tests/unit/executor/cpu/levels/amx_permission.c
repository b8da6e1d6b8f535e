/* Asks Linux to lend the program the registers of AMX, as support.c does for a process that loads the kernels. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((constructor)) static void lend(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
}
