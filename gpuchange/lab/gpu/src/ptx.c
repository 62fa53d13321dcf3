/* A small PTX interpreter: enough to run one-dimensional integer and float kernels without shared memory.
 *
 * Text is compiled once into an array of instructions with resolved registers and labels; a launch then runs
 * thread after thread. Anything outside the subset is refused at load (CUDA_ERROR_INVALID_PTX), as a real driver
 * refuses what it cannot assemble. */
#define _GNU_SOURCE
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "simgpu.h"

#define MAX_NAME 48
#define MAX_REGISTERS 256
#define MAX_CODE 1024
#define MAX_PARAMS 16
#define MAX_ENTRIES 8
#define MAX_LABELS 64
#define MAX_STEPS 100000000ull /* a kernel that never ends is cut off, as a watchdog would */

enum op { LD_PARAM, LD, ST, MOV, ADD, SUB, MUL, MULWIDE, MAD, FMA, AND, OR, XOR, SHL, SHR, SETP, BRA, RET, CVT };
enum compare { EQ, NE, LT, LE, GT, GE };

struct operand {
    enum { REGISTER, IMMEDIATE, SPECIAL } kind;
    uint64_t value; /* register index, literal, or index of a special register */
    int64_t offset; /* of [register+offset] */
};

struct instruction {
    enum op op;
    enum compare compare;
    char type;  /* 'u', 's', 'f' or 'b' */
    char from;  /* cvt: the source's type */
    int bytes;  /* 4 or 8 */
    int guard, negated, target; /* predicate register or -1; index or label to jump to */
    struct operand operand[4];
};

struct entry {
    char name[MAX_NAME], params[MAX_PARAMS][MAX_NAME], registers[MAX_REGISTERS][MAX_NAME], labels[MAX_LABELS][MAX_NAME];
    int param_bytes[MAX_PARAMS], param_count, register_count, label_at[MAX_LABELS], label_count, length;
    struct instruction code[MAX_CODE];
};

struct module {
    struct entry *entries[MAX_ENTRIES];
    int count;
};

static const char *special_names[] = {"%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"};
static const struct { const char *name; enum op op; } ops[] = {
    {"ld.param", LD_PARAM}, {"ld.global", LD}, {"st.global", ST}, {"mul.wide", MULWIDE}, {"cvta.to.global", MOV},
    {"mov", MOV}, {"add", ADD}, {"sub", SUB}, {"mul", MUL}, {"mad.lo", MAD}, {"fma.rn", FMA}, {"and", AND}, {"or", OR},
    {"xor", XOR}, {"shl", SHL}, {"shr", SHR}, {"setp", SETP}, {"bra", BRA}, {"ret", RET}, {"cvt", CVT},
};
static const char *compares[] = {"eq", "ne", "lt", "le", "gt", "ge"};

/* --- compiling ------------------------------------------------------------------------------------------ */

static int find(char names[][MAX_NAME], int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(names[i], name)) return i;
    return -1;
}

static int intern(char names[][MAX_NAME], int *count, int most, const char *name) {
    int at = find(names, *count, name);
    if (at >= 0 || *count == most) return at;
    strncpy(names[*count], name, MAX_NAME - 1);
    return (*count)++;
}

static int register_of(struct entry *e, const char *name) {
    return intern(e->registers, &e->register_count, MAX_REGISTERS, name);
}

static int parse_operand(struct entry *e, char *text, struct operand *out) {
    char *plus, *end;
    memset(out, 0, sizeof *out);
    if (*text == '[') {
        text++, text[strcspn(text, "]")] = 0;
        if ((plus = strchr(text, '+'))) *plus = 0, out->offset = strtoll(plus + 1, NULL, 0);
    }
    for (int i = 0; i < 4; i++)
        if (!strcmp(text, special_names[i])) return out->kind = SPECIAL, out->value = i, 1;
    if (*text == '%') return out->value = register_of(e, text), out->kind = REGISTER, (int)out->value >= 0;
    out->kind = IMMEDIATE;
    if (!strncasecmp(text, "0f", 2)) return out->value = strtoul(text + 2, &end, 16), !*end;
    if (isdigit((unsigned char)*text) || *text == '-') return out->value = strtoll(text, &end, 0), !*end || *end == 'U';
    int param = find(e->params, e->param_count, text);
    return out->value = param, param >= 0;
}

static int parse_type(const char *type, struct instruction *ins) {
    const char *bits = type + 1;
    ins->type = *type;
    ins->bytes = !strcmp(bits, "64") ? 8 : 4;
    return strchr("usfb", *type) && *type && (!strcmp(bits, "32") || !strcmp(bits, "64"));
}

/* "setp.ge.u32" -> op, comparison, type. */
static int parse_opcode(char *text, struct instruction *ins) {
    char *dot = strrchr(text, '.');
    if (!strcmp(text, "ret")) return ins->op = RET, 1;
    if (!strcmp(text, "bra") || !strcmp(text, "bra.uni")) return ins->op = BRA, 1;
    if (!dot || !parse_type(dot + 1, ins)) return 0;
    *dot = 0;
    if (!strncmp(text, "setp.", 5))
        for (int i = 0; i < 6; i++)
            if (!strcmp(text + 5, compares[i])) return ins->op = SETP, ins->compare = i, 1;
    if (!strncmp(text, "cvt.", 4) && (dot = strrchr(text, '.'))) {
        struct instruction to;
        ins->op = CVT, ins->from = ins->type;
        return parse_type(dot + 1, &to) && (ins->type = to.type, ins->bytes = to.bytes, 1);
    }
    for (char *rounding; (rounding = strstr(text, ".rn")) || (rounding = strstr(text, ".lo"));)
        if (!strcmp(text, "fma.rn") || !strcmp(text, "mad.lo")) break;
        else *rounding = 0;
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (!strcmp(text, ops[i].name)) return ins->op = ops[i].op, 1;
    return 0;
}

static int parse_guard(struct entry *e, char **text, struct instruction *ins) {
    char *name;
    ins->guard = -1;
    if (**text != '@') return 1;
    name = *text + 1;
    if ((ins->negated = *name == '!')) name++;
    *text = name + strcspn(name, " \t\n");
    if (**text) *(*text)++ = 0;
    *text += strspn(*text, " \t\n");
    return (ins->guard = register_of(e, name)) >= 0;
}

static int parse_operands(struct entry *e, char *rest, struct instruction *ins) {
    char *save = NULL, *word = strtok_r(rest, ", \t\n", &save);
    if (ins->op == BRA)
        return word && (ins->target = intern(e->labels, &e->label_count, MAX_LABELS, word)) >= 0;
    for (int i = 0; word; word = strtok_r(NULL, ", \t\n", &save), i++)
        if (i == 4 || !parse_operand(e, word, &ins->operand[i])) return 0;
    return 1;
}

static int parse_statement(struct entry *e, char *text) {
    struct instruction ins;
    char *rest;
    memset(&ins, 0, sizeof ins);
    text += strspn(text, " \t\n");
    if (!*text || !strncmp(text, ".reg", 4)) return 1;
    if (e->length == MAX_CODE || !parse_guard(e, &text, &ins)) return 0;
    rest = text + strcspn(text, " \t\n");
    if (*rest) *rest++ = 0;
    if (!parse_opcode(text, &ins) || !parse_operands(e, rest, &ins)) return 0;
    e->code[e->length++] = ins;
    return 1;
}

static int parse_body(struct entry *e, char *body) {
    char *end;
    for (; (end = strpbrk(body, ";:")); body = end + 1) {
        int is_label = *end == ':';
        *end = 0;
        if (is_label) {
            int at = intern(e->labels, &e->label_count, MAX_LABELS, body + strspn(body, " \t\n"));
            if (at < 0) return 0;
            e->label_at[at] = e->length;
        } else if (!parse_statement(e, body)) return 0;
    }
    return e->length > 0 && e->code[e->length - 1].op == RET;
}

static int parse_params(struct entry *e, char *text) {
    char *save = NULL, *word = strtok_r(text, ", \t\n", &save);
    for (; word; word = strtok_r(NULL, ", \t\n", &save)) {
        if (!strcmp(word, ".param")) continue;
        if (e->param_count == MAX_PARAMS) return 0;
        if (*word == '.') e->param_bytes[e->param_count] = strstr(word, "64") ? 8 : 4;
        else strncpy(e->params[e->param_count++], word, MAX_NAME - 1);
    }
    return 1;
}

static void strip_comments(char *text) {
    for (char *at; (at = strstr(text, "//"));) memset(at, ' ', strcspn(at, "\n"));
}

static int parse_module(char *text, struct module *module) {
    char *at = text, *name, *params, *body, *end;
    while ((at = strstr(at, ".entry"))) {
        struct entry *e = module->count < MAX_ENTRIES ? calloc(1, sizeof *e) : NULL;
        if (!e) return 0;
        module->entries[module->count++] = e;
        name = at + strlen(".entry"), name += strspn(name, " \t\n");
        if (!(params = strchr(name, '(')) || !(body = strchr(params, '{')) || !(end = strchr(body, '}'))) return 0;
        *params++ = 0, *body++ = 0, *end = 0;
        strncpy(e->name, name, strcspn(name, " \t\n") < MAX_NAME ? strcspn(name, " \t\n") : MAX_NAME - 1);
        params[strcspn(params, ")")] = 0;
        if (!parse_params(e, params) || !parse_body(e, body)) return 0;
        at = end + 1;
    }
    return module->count > 0;
}

int ptx_load(const char *text, struct module **out) {
    struct module *module;
    char *copy;
    int good;
    if (!text || !strstr(text, ".version") || !strstr(text, ".target")) return INVALID_IMAGE;
    if (!(module = calloc(1, sizeof *module)) || !(copy = strdup(text))) return OUT_OF_MEMORY;
    strip_comments(copy);
    good = parse_module(copy, module);
    free(copy);
    if (!good) return ptx_unload(module), INVALID_PTX;
    *out = module;
    return SUCCESS;
}

void ptx_unload(struct module *module) {
    if (!module) return;
    for (int i = 0; i < module->count; i++) free(module->entries[i]);
    free(module);
}

int ptx_entry(struct module *module, const char *name, struct entry **out) {
    for (int i = 0; module && i < module->count; i++)
        if (!strcmp(module->entries[i]->name, name)) return *out = module->entries[i], SUCCESS;
    return module ? NOT_FOUND : INVALID_HANDLE;
}

/* --- running -------------------------------------------------------------------------------------------- */

struct thread {
    uint64_t registers[MAX_REGISTERS];
    uint32_t special[4];
    void **params;
    int wrong;
    int (*inside)(uint64_t, size_t);
    unsigned long long fmas;
};

static float as_float(uint64_t bits) {
    float f;
    uint32_t low = (uint32_t)bits;
    return memcpy(&f, &low, 4), f;
}

static uint64_t float_bits(float f) {
    uint32_t bits;
    return memcpy(&bits, &f, 4), bits;
}

static uint64_t value(const struct thread *t, const struct operand *o) {
    return o->kind == REGISTER ? t->registers[o->value] : o->kind == SPECIAL ? t->special[o->value] : o->value;
}

static uint64_t float_result(enum op op, float a, float b, float c) {
    switch (op) {
        case ADD: return float_bits(a + b);
        case SUB: return float_bits(a - b);
        case MUL: return float_bits(a * b);
        case FMA: return float_bits(fmaf(a, b, c));
        default: return float_bits(a);
    }
}

static uint64_t integer_result(enum op op, uint64_t a, uint64_t b, uint64_t c) {
    switch (op) {
        case ADD: return a + b;
        case SUB: return a - b;
        case MUL: return a * b;
        case MULWIDE: return (uint64_t)(uint32_t)a * (uint32_t)b;
        case MAD: return a * b + c;
        case AND: return a & b;
        case OR: return a | b;
        case XOR: return a ^ b;
        case SHL: return a << b;
        case SHR: return a >> b;
        default: return a;
    }
}

static int holds(const struct instruction *ins, uint64_t a, uint64_t b) {
    int64_t order = ins->type == 's' ? ((int32_t)a > (int32_t)b) - ((int32_t)a < (int32_t)b)
        : ins->type == 'f' ? (as_float(a) > as_float(b)) - (as_float(a) < as_float(b)) : (a > b) - (a < b);
    switch (ins->compare) {
        case EQ: return order == 0;
        case NE: return order != 0;
        case LT: return order < 0;
        case LE: return order <= 0;
        case GT: return order > 0;
        default: return order >= 0;
    }
}

static uint64_t converted(const struct instruction *ins, uint64_t a) {
    if (ins->type == 'f') return float_bits(ins->from == 's' ? (float)(int32_t)a : (float)(uint32_t)a);
    if (ins->from == 'f') return (uint64_t)(int64_t)as_float(a);
    return ins->from == 's' ? (uint64_t)(int64_t)(int32_t)a : a;
}

static int access_memory(struct thread *t, const struct instruction *ins) {
    const struct operand *where = &ins->operand[ins->op == ST ? 0 : 1];
    uint64_t address = value(t, where) + where->offset, stored;
    if (!t->inside(address, ins->bytes)) return ILLEGAL_ADDRESS;
    if (ins->op == LD) {
        t->registers[ins->operand[0].value] = 0;
        memcpy(&t->registers[ins->operand[0].value], (void *)address, ins->bytes);
        return SUCCESS;
    }
    stored = value(t, &ins->operand[1]);
    if (t->wrong && t->special[0] % 97 == 13) stored ^= 1u << 20; /* the broken lanes of a wrong card */
    memcpy((void *)address, &stored, ins->bytes);
    return SUCCESS;
}

static void load_param(struct thread *t, const struct instruction *ins) {
    uint64_t loaded = 0;
    memcpy(&loaded, t->params[ins->operand[1].value], ins->bytes);
    t->registers[ins->operand[0].value] = loaded;
}

static void compute(struct thread *t, const struct instruction *ins) {
    uint64_t a = value(t, &ins->operand[1]), b = value(t, &ins->operand[2]), c = value(t, &ins->operand[3]), result;
    int is_float = ins->type == 'f' && ins->op != MOV;
    if (ins->op == SETP) result = holds(ins, a, b);
    else if (ins->op == CVT) result = converted(ins, a);
    else if (is_float) result = float_result(ins->op, as_float(a), as_float(b), as_float(c));
    else result = integer_result(ins->op, a, b, c);
    if (ins->bytes == 4 && ins->op != MULWIDE) result = (uint32_t)result;
    t->registers[ins->operand[0].value] = result;
}

static int run_thread(const struct entry *e, struct thread *t) {
    unsigned long long steps = 0;
    for (int at = 0; at < e->length && steps < MAX_STEPS; at++, steps++) {
        const struct instruction *ins = &e->code[at];
        int rc = SUCCESS;
        if (ins->guard >= 0 && (t->registers[ins->guard] != 0) == ins->negated) continue;
        switch (ins->op) {
            case RET: return SUCCESS;
            case BRA: at = e->label_at[ins->target] - 1; break;
            case LD_PARAM: load_param(t, ins); break;
            case LD: case ST: rc = access_memory(t, ins); break;
            default: compute(t, ins), t->fmas += ins->op == FMA;
        }
        if (rc) return rc;
    }
    return steps == MAX_STEPS ? ILLEGAL_ADDRESS : SUCCESS;
}

int ptx_run(struct entry *entry, unsigned blocks, unsigned threads, void **params, int wrong,
            int (*inside)(uint64_t, size_t), unsigned long long *fmas) {
    static __thread struct thread t;
    t.params = params, t.wrong = wrong, t.inside = inside, t.fmas = 0;
    for (unsigned block = 0; block < blocks; block++)
        for (unsigned lane = 0; lane < threads; lane++) {
            int rc;
            t.special[0] = lane, t.special[1] = threads, t.special[2] = block, t.special[3] = blocks;
            if ((rc = run_thread(entry, &t))) return rc;
        }
    *fmas = t.fmas;
    return SUCCESS;
}
