/* The instructions of AMX, each with the memory that it reads or writes as an operand. GCC's own intrinsics (12 to 14,
 * amxtileintrin.h) name 8 of the 64 bytes that ldtilecfg reads and nothing of what tileloadd reads, so that the compiler
 * may drop the stores before them or move them behind: tiles were then loaded from memory that nobody had written. */
#ifndef RZ_INSTRUCTIONS_AMX_H
#define RZ_INSTRUCTIONS_AMX_H

enum { TILE_REGISTERS = 8, PAIRS_OF_TILE = 16, ROWS_OF_TILE = 16 };

/* Of the palette of eight tiles: Intel 64 Architectures Software Developer's Manual, volume 1, section 18.3. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

_Static_assert(sizeof(tile_shapes) == 64, "ldtilecfg reads 64 bytes");

/* Shapes all tiles and sets them to zero. */
#define tiles_shape(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(*(const tile_shapes *)(shapes)))
#define tiles_release() __asm__ volatile("tilerelease" : : : "memory")

/* To shape tiles takes as long as a small product: a thread keeps them as they are until others are asked for. */
static _Thread_local int shaped_for; /* so many rows; 0: not shaped */

/* Rows of tile number `tile`, `stride` bytes apart. Which bytes that are, only the shapes tell: so any memory. */
#define load_tile(how, tile, from, stride) \
    __asm__ volatile(how " (%0,%1,1), %%tmm" #tile : : "r"((const void *)(from)), "r"((long)(stride)) : "memory")
#define tile_load(tile, from, stride) load_tile("tileloadd", tile, from, stride)
/* Past the first cache: rows that are read anew for each panel, and are too many for it, leave the panel there. */
#define tile_load_passing(tile, from, stride) load_tile("tileloaddt1", tile, from, stride)
#define tile_store(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"((void *)(to)), "r"((long)(stride)) : "memory")

#define tile_zero(tile) __asm__ volatile("tilezero %%tmm" #tile : :)

/* Adds the products of tile `a`, rows of x, with tile `b`, weights, to tile `sums`. */
#define tile_multiply_bf16(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : :)
#define tile_multiply_bytes(sums, a, b) __asm__ volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : :)
#define tile_multiply_signed(sums, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : :)
#define tile_multiply_signed_unsigned(sums, a, b) \
    __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : :)

#endif
