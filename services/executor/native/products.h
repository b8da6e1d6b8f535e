/* Products with a linear layer's weights, and what is done with the sums while they are in registers. */
#ifndef RZ_PRODUCTS_H
#define RZ_PRODUCTS_H

#include "state.h"

typedef enum { STORE, ADD, ACTIVATE, LARGEST } rz_product_end;

typedef struct {
    const rz_linear *linear; /* with ACTIVATE and LARGEST one alone */
    const bf16 *x;
    long rows, stride; /* of x, in values; stride 0: rows follow each other */
    rz_product_end end;
    void *out; /* STORE: float32 [rows, outputs]; ADD: float32, added to; ACTIVATE: bf16 [rows, outputs / 2];
                  LARGEST: rz_best [threads, rows], which are set anew */
    float scale, cap;
    int activation;
} rz_product;

/* Called by all threads alike; its time is booked on `part`. Where a linear is quantized, there must be room for the
 * rounded rows: rz_workspace_reserve_rounded. */
void rz_multiply(rz_decoder *decoder, int thread, int part, rz_product job);

/* Bytes of one rounded row of its inputs; 0 where nothing of it is quantized. */
size_t rz_rounded_row(const rz_linear *linear);

#endif
