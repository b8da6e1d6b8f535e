/* Whether a level computes on this processor what its kernels say: asked when a process chooses it, in less than a
 * millisecond. No test of a release can tell that: compilers, hypervisors and emulators differ. */
#ifndef RZ_PROOF_H
#define RZ_PROOF_H

/* In the order in which they are proven. As `library.PROOFS` names them. */
enum { RZ_PROVEN, RZ_WRONG_BF16, RZ_WRONG_INT8, RZ_WRONG_DIGITS, RZ_WRONG_ATTENTION, RZ_WRONG_CODED_ATTENTION,
       RZ_UNPROVEN /* no memory for it */ };

/* The first kernel that computes something else than plain C does; RZ_PROVEN if none. */
int rz_prove(void);

#endif
