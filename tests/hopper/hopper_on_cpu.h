// What hopper.cuh says, for a CPU; put behind warp_on_cpu.h. Whatever runs beside on the chip is done at one of the
// ends of the time it may take: tiles are fetched at once, or when somebody waits for them (FETCH_LATE); products are
// made when they are waited for.
#include <map>

struct TensorMap { u64 base, sizes[4], strides[4], box[4]; };  // strides in numbers

inline char* shared_room() { return room + fibers::block() * ROOM_OF_BLOCK; }
inline u32 address_of(const char* shared) { return shared - room; }
inline u32 in_block(u32 address, int block) { return address % ROOM_OF_BLOCK + block * ROOM_OF_BLOCK; }

struct Barrier {
    int arrivals, missing, bytes, passed;
    void look() {
        if (missing == 0 && bytes == 0) passed++, missing = arrivals;
    }
};
std::map<u32, Barrier> barriers;
inline void init_barrier(u32 barrier, int arrivals) { barriers[barrier] = {arrivals, arrivals, 0, 0}; }
inline void show_barriers() {}
inline void arrive_at(u32 barrier, int block) {
    Barrier& b = barriers.at(in_block(barrier, block));
    b.missing--, b.look();
}
inline void arrive_expecting(u32 barrier, u32 bytes) {
    Barrier& b = barriers.at(barrier);
    b.bytes += bytes, b.missing--, b.look();
}

struct Fetch { u32 to; TensorMap map; u32 barrier; int at[4]; };  // its thread may be gone when it is made
std::vector<Fetch> fetches;
inline u32 exchanged(u32 address) { return address ^ (address >> 7 & 7) << 4; }
inline void make(const Fetch& fetch) {
    const TensorMap& m = fetch.map;
    int bytes = 0;
    for (u64 w = 0; w < m.box[3]; w++)
        for (u64 z = 0; z < m.box[2]; z++)
            for (u64 y = 0; y < m.box[1]; y++)
                for (u64 x = 0; x < m.box[0]; x++, bytes += 2) {
                    u64 at[4] = {fetch.at[0] + x, fetch.at[1] + y, fetch.at[2] + z, fetch.at[3] + w}, place = 0;
                    bool inside = true;
                    for (int i = 0; i < 4; i++) inside &= at[i] < m.sizes[i], place += at[i] * m.strides[i];
                    *(u16*)(room + exchanged(fetch.to + bytes)) = inside ? ((const u16*)m.base)[place] : 0;
                }
    Barrier& b = barriers.at(fetch.barrier);
    b.bytes -= bytes, b.look();
}
inline void ask(const Fetch& fetch) {
#if FETCH_LATE
    fetches.push_back(fetch);
#else
    make(fetch);
#endif
}
inline void fetch_2d(u32 to, const TensorMap* map, u32 barrier, int x, int y, u16 blocks) {
    for (int b = 0; b < MOST_BLOCKS; b++)
        if (blocks >> b & 1) ask({in_block(to, b), *map, in_block(barrier, b), {x, y, 0, 0}});
}
inline void fetch_2d(u32 to, const TensorMap* map, u32 barrier, int x, int y) { ask({to, *map, barrier, {x, y, 0, 0}}); }
inline void fetch_4d(u32 to, const TensorMap* map, u32 barrier, int x, int w) { ask({to, *map, barrier, {x, 0, 0, w}}); }
struct Sent { u32 to, barrier; float numbers[4]; };
std::vector<Sent> sent;
inline void make(const Sent& s) {
    memcpy(room + s.to, s.numbers, 16);
    Barrier& b = barriers.at(s.barrier);
    b.bytes -= 16, b.look();
}
inline void send(u32 to, u32 barrier, int block, float a, float b, float c, float d) {
    Sent s{in_block(to, block), in_block(barrier, block), {a, b, c, d}};
#if FETCH_LATE
    sent.push_back(s);
#else
    make(s);
#endif
}
template <class Asked>
inline void make_those_of(u32 barrier, std::vector<Asked>& pending) {
    std::vector<Asked> others, all;
    std::swap(pending, all);
    for (const Asked& asked : all)
        if (asked.barrier == barrier) make(asked);
        else others.push_back(asked);
    pending.insert(pending.end(), others.begin(), others.end());
}
inline void wait_at(u32 barrier, int parity) {
    fibers::until([&] {
        make_those_of(barrier, fetches), make_those_of(barrier, sent);
        return (barriers.at(barrier).passed & 1) != parity;
    });
}

inline int rank_in_cluster() { return fibers::block(); }
inline void arrive_in_cluster() { fibers::all[fibers::now].waits[3]++; }
inline void wait_for_cluster() {
    int mine = fibers::all[fibers::now].waits[3];
    fibers::until([&] {
        for (int i = 0; i < fibers::blocks_of_cluster * fibers::count; i++)
            if (fibers::all[i].waits[3] < mine) return false;
        return true;
    });
}

inline u64 tile_at(u32 address) { return address; }
struct Product { float* sums; int count; u64 a, b; bool adds; int group; };
struct { std::vector<Product> pending; int groups = 0; } products[fibers::MOST];
template <int COUNT>
inline void multiply_tile(float (&sums)[COUNT], u64 a, u64 b, bool adds) {
    auto& mine = products[fibers::now];
    mine.pending.push_back({sums, COUNT, a, b, adds, mine.groups});
}
// Rows lie in eights of 1024 bytes. A lane has rows g and g + 8 of its warp's 16, and columns 2t and 2t + 1 of each 8.
inline float of_tile(u64 tile, int row, int place) {
    return number(*(u16*)(room + exchanged(tile + row / 8 * 1024 + row % 8 * 128 + place * 2)));
}
inline void make(const Product& p) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    for (int i = 0; i < p.count; i++) {
        int row = warp * 16 + lane / 4 + (i / 2 % 2) * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += of_tile(p.a, row, k) * of_tile(p.b, column, k);
        p.sums[i] = p.adds ? p.sums[i] + sum : sum;
    }
}
inline void begin_products() {}
inline void end_products() { products[fibers::now].groups++; }
template <int LEFT>
inline void wait_for_products() {
    auto& mine = products[fibers::now];
    std::vector<Product> still;
    for (const Product& p : mine.pending)
        if (p.group >= mine.groups - LEFT) still.push_back(p);
        else make(p);
    mine.pending = still;
}
template <int COUNT>
inline void hold(float (&)[COUNT]) {}
inline float reciprocal(float x) { return 1 / x; }
inline u32 multiply_pairs(u32 x, u32 y) { return pack(low_of(x) * low_of(y), high_of(x) * high_of(y)); }
inline void look_ahead(const TensorMap*) {}
template <int COUNT>
inline void give_registers() {}
template <int COUNT>
inline void take_registers() {}
