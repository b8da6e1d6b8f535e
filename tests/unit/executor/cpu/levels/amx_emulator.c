/* AMX for processors that lack it: each of its instructions is an illegal one there, and is carried out by the handler of
 * SIGILL. So what runs is the machine code that a compiler made, with the order of its loads and stores. Linked into a
 * program, or loaded into a process as a shared library.
 *
 *     SIGILL ── C4 e2 .. 49|4b|5c|5e ──▶ decode ──▶ registers and memory of the thread ──▶ next instruction
 *
 * A tile that is used otherwise than it was shaped ends the process, as it would on a processor. Source: Intel 64 and
 * IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILELOADDT1, TILERELEASE, TDPBF16PS,
 * TDPBSSD, TDPBSUD, TDPBUSD, TILEZERO. */
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

typedef struct {
    tile_shapes shapes;
    uint32_t tiles[8][16][16];
} tile_registers;

typedef struct {
    int prefix, opcode; /* of VEX: 0 none, 1 66, 2 F3, 3 F2 */
    int reg, rm, vvvv;
    int in_memory;
    uint64_t address; /* without the index */
    int64_t stride;   /* of the index, scaled */
    int length;
} instruction;

enum { PREFIX_NONE, PREFIX_66, PREFIX_F3, PREFIX_F2 };

static _Thread_local tile_registers *of_thread __attribute__((tls_model("initial-exec")));

static tile_registers *registers(void)
{
    if (!of_thread)
        of_thread = mmap(NULL, sizeof *of_thread, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return of_thread;
}

static void fault_if(int faults)
{
    static const char said[] = "differs: a tile is used otherwise than it was shaped\n";
    if (!faults)
        return;
    (void)!write(2, said, sizeof said - 1);
    _exit(1);
}

static void load_shapes(tile_registers *of, const void *shapes)
{
    memcpy(&of->shapes, shapes, sizeof of->shapes);
    fault_if(of->shapes.palette != 1 || of->shapes.start_row);
    for (int tile = 0; tile < 8; tile++)
        fault_if(of->shapes.rows[tile] < 1 || of->shapes.rows[tile] > 16 || of->shapes.row_bytes[tile] > 64);
    for (int i = 0; i < 14; i++)
        fault_if(of->shapes.reserved[i]);
    for (int i = 8; i < 16; i++)
        fault_if(of->shapes.rows[i] || of->shapes.row_bytes[i]);
    memset(of->tiles, 0, sizeof of->tiles);
}

static void move_tile(tile_registers *of, const instruction *one, int stores)
{
    fault_if(!of->shapes.palette);
    for (int row = 0; row < of->shapes.rows[one->reg]; row++) {
        char *memory = (char *)(one->address + (uint64_t)(row * one->stride));
        void *tile = of->tiles[one->reg][row];
        memcpy(stores ? memory : tile, stores ? tile : memory, of->shapes.row_bytes[one->reg]);
    }
    if (!stores)
        for (int row = 0; row < 16; row++) {
            const int loaded = row < of->shapes.rows[one->reg] ? of->shapes.row_bytes[one->reg] : 0;
            memset((char *)of->tiles[one->reg][row] + loaded, 0, (size_t)(64 - loaded));
        }
}

static float bf16_of(uint32_t pair, int which)
{
    uint32_t bits = which ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float add_bf16_products(float sum, const uint32_t *a, const uint32_t (*b)[16], int column, int quads)
{
    float sums[2] = { 0, 0 };
    for (int k = 0; k < quads; k++)
        for (int which = 0; which < 2; which++)
            sums[which] = fmaf(bf16_of(a[k], which), bf16_of(b[k][column], which), sums[which]);
    return sum + (sums[0] + sums[1]);
}

/* Number `byte` of four, with its sign or without. */
static int byte_of(uint32_t quad, int byte, int is_signed)
{
    const uint8_t value = (uint8_t)(quad >> (8 * byte));
    return is_signed ? (int8_t)value : value;
}

static uint32_t add_byte_products(uint32_t sum, const uint32_t *a, const uint32_t (*b)[16], int column, int quads, int prefix)
{
    const int signed_a = prefix == PREFIX_F2 || prefix == PREFIX_F3, signed_b = prefix == PREFIX_F2 || prefix == PREFIX_66;
    for (int k = 0; k < quads; k++)
        for (int byte = 0; byte < 4; byte++)
            sum += (uint32_t)(byte_of(a[k], byte, signed_a) * byte_of(b[k][column], byte, signed_b));
    return sum;
}

static void multiply_tiles(tile_registers *of, const instruction *one, int bytes)
{
    const tile_shapes *shapes = &of->shapes;
    const int c = one->reg, a = one->rm, b = one->vvvv, quads = shapes->rows[b];
    fault_if(!shapes->palette || a == b || a == c || b == c);
    fault_if(shapes->rows[c] != shapes->rows[a] || quads * 4 != shapes->row_bytes[a]);
    fault_if(shapes->row_bytes[c] != shapes->row_bytes[b]);
    for (int row = 0; row < shapes->rows[c]; row++)
        for (int column = 0; column < shapes->row_bytes[c] / 4; column++) {
            uint32_t *sum = &of->tiles[c][row][column];
            const uint32_t *inputs = of->tiles[a][row];
            const uint32_t (*weights)[16] = (const uint32_t (*)[16])of->tiles[b];
            float value;
            memcpy(&value, sum, sizeof value);
            value = add_bf16_products(value, inputs, weights, column, quads);
            if (bytes)
                *sum = add_byte_products(*sum, inputs, weights, column, quads, one->prefix);
            else
                memcpy(sum, &value, sizeof value);
        }
}

/* In the order of their numbers in machine code. */
static const int GREGS[16] = { REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15 };

static int64_t displacement(const uint8_t *at, int bytes)
{
    int32_t four;
    memcpy(&four, at, sizeof four);
    return bytes == 4 ? four : bytes == 1 ? (int8_t)*at : 0;
}

/* The address of an operand in memory: mod, r/m, SIB and displacement behind the opcode. */
static void decode_address(instruction *one, const uint8_t *modrm, const greg_t *registers_of, int b, int x, uint64_t start)
{
    const int mod = *modrm >> 6, has_sib = (*modrm & 7) == 4;
    const uint8_t *at = modrm + 1;
    int base = *modrm & 7;
    if (has_sib) {
        const int index = (*at >> 3 & 7) | x << 3;
        one->stride = index == 4 ? 0 : (int64_t)((uint64_t)registers_of[GREGS[index]] << (*at >> 6));
        base = *at++ & 7;
    }
    const int is_bare = mod == 0 && base == 5; /* no base, but a displacement of 4 bytes */
    const int bytes = mod == 1 ? 1 : mod == 2 || is_bare ? 4 : 0;
    one->length += (int)(at - modrm) + bytes;
    one->address = (uint64_t)displacement(at, bytes);
    if (!is_bare)
        one->address += (uint64_t)registers_of[GREGS[base | b << 3]];
    else if (!has_sib)
        one->address += start + (uint64_t)one->length; /* relative to the next instruction */
}

/* Whether it is one of AMX's: VEX of three bytes, of the map 0F 38, W 0 and L 0. */
static int decode(instruction *one, const greg_t *registers_of)
{
    const uint8_t *code = (const uint8_t *)registers_of[REG_RIP];
    if (code[0] != 0xc4 || (code[1] & 31) != 2 || code[2] & 0x84)
        return 0;
    *one = (instruction){ .prefix = code[2] & 3, .opcode = code[3], .reg = code[4] >> 3 & 7, .rm = code[4] & 7,
                          .vvvv = ~code[2] >> 3 & 7, .in_memory = code[4] >> 6 != 3, .length = 4 };
    if (one->in_memory)
        decode_address(one, code + 4, registers_of, !(code[1] & 0x20), !(code[1] & 0x40), (uint64_t)registers_of[REG_RIP]);
    else
        one->length++;
    return 1;
}

static int carry_out(const instruction *one)
{
    tile_registers *of = registers();
    const int kind = one->opcode << 8 | one->prefix << 4 | one->in_memory;
    switch (kind) {
    case 0x49 << 8 | PREFIX_NONE << 4 | 1:
        load_shapes(of, (const void *)(one->address + (uint64_t)one->stride));
        return 1;
    case 0x49 << 8 | PREFIX_NONE << 4 | 0:
        memset(of, 0, sizeof *of);
        return 1;
    case 0x49 << 8 | PREFIX_F2 << 4 | 0:
        memset(of->tiles[one->reg], 0, sizeof of->tiles[one->reg]);
        return 1;
    case 0x4b << 8 | PREFIX_F2 << 4 | 1:
    case 0x4b << 8 | PREFIX_66 << 4 | 1:
        move_tile(of, one, 0);
        return 1;
    case 0x4b << 8 | PREFIX_F3 << 4 | 1:
        move_tile(of, one, 1);
        return 1;
    case 0x5c << 8 | PREFIX_F3 << 4 | 0:
        multiply_tiles(of, one, 0);
        return 1;
    case 0x5e << 8 | PREFIX_66 << 4 | 0:
    case 0x5e << 8 | PREFIX_F2 << 4 | 0:
    case 0x5e << 8 | PREFIX_F3 << 4 | 0:
        multiply_tiles(of, one, 1);
        return 1;
    }
    return 0;
}

static void on_illegal(int number, siginfo_t *info, void *context)
{
    greg_t *registers_of = ((ucontext_t *)context)->uc_mcontext.gregs;
    instruction one;
    (void)info;
    if (decode(&one, registers_of) && carry_out(&one))
        registers_of[REG_RIP] += one.length;
    else
        signal(number, SIG_DFL); /* it is carried out again, and ends the process */
}

__attribute__((constructor)) static void emulate(void)
{
    struct sigaction action = { .sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO };
    sigaction(SIGILL, &action, NULL);
}
