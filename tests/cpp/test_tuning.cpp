// What is measured of a machine: what is chosen, where it is kept, and that no bit of a result
// depends on it (test_matmul_ternary.cpp has the rows of panels).
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "check.h"
#include "core/memory.h"
#include "core/tuned.h"
#include "effinfer/error.h"
#include "ops/matmul.h"
#include "ops/registry.h"
#include "weights/calibrate.h"
#include "weights/tuning_file.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;
namespace fs = std::filesystem;

// Puts back what is in use.
class Kept {
 public:
  Kept() {
    for (const WeightStream stream : kWeightStreams) fetches_.push_back(fetch_tuning(stream));
    for (const PackedTernary packed : kPackedTernary) panels_.push_back(panel_tuning(packed));
  }
  ~Kept() {
    for (const WeightStream stream : kWeightStreams) {
      set_fetch_tuning(stream, fetches_[static_cast<size_t>(stream)]);
    }
    for (const PackedTernary packed : kPackedTernary) {
      set_panel_tuning(packed, panels_[static_cast<size_t>(packed)]);
    }
  }

 private:
  std::vector<FetchTuning> fetches_;
  std::vector<PanelTuning> panels_;
};

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "effinfer-tuning-XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string path() const { return path_.string(); }
  std::string file() const {
    for (const auto& entry : fs::directory_iterator(path_)) return entry.path().string();
    return "";
  }

 private:
  fs::path path_;
};

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

PackedBuffer random_weight(DType dtype, int64_t rows, int64_t cols, TernaryForm form) {
  ThreadPool pool(1);
  TensorView view{nullptr, dtype, {rows, cols}};
  std::vector<uint8_t> bytes(view.num_bytes());
  std::mt19937 random(1);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() & 0x55);
  view.data = bytes.data();
  return pack(view, pool, form);
}

std::vector<float> multiply(const PackedWeight& weight, Arithmetic arithmetic, int64_t rows,
                            Isa isa) {
  const auto row_bytes = static_cast<size_t>(operand_row_bytes(arithmetic, weight.cols));
  const size_t count = static_cast<size_t>(rows) * row_bytes;
  const std::shared_ptr<void> operand = memory_of({}).allocate(count, Pages::heap);
  std::vector<float> x(static_cast<size_t>(rows * weight.cols));
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
  std::vector<float> out(static_cast<size_t>(rows * weight.rows));

  ThreadPool pool(2);
  ToOperandProblem store;
  store.x = x.data();
  store.x_stride = weight.cols;
  store.out = {arithmetic, rows, weight.cols, operand.get()};
  run_alone(store, pool);
  MatmulProblem problem;
  problem.x = store.out;
  problem.num_parts = 1;
  problem.parts[0].weight = weight;
  problem.parts[0].out = out.data();
  problem.parts[0].out_stride = weight.rows;
  const auto& variant = table<MatmulProblem>().select(problem, Target{{}, isa});
  if (variant.scratch_bytes != nullptr) pool.reserve_scratch(variant.scratch_bytes(problem));
  pool.parallel([&](Team& team) { variant.run(problem, team); });
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST("tuning: a distance is known from the start and refused when it makes no sense") {
  const Kept kept;
  CHECK(!describe_tuning().empty());
  CHECK(fetch_tuning(WeightStream::int8).source != TuningSource::measured);
  set_fetch_tuning(WeightStream::int8, {{8192, 512}, TuningSource::fixed, "a test"});
  CHECK(fetch_distance(WeightStream::int8) == (FetchDistance{8192, 512}));
  CHECK(describe_tuning().find("int8 8192/512 (a test)") != std::string::npos);
  for (const FetchDistance wrong : {FetchDistance{-64, 0}, {0, 65600}, {100, 0}}) {
    CHECK_THROWS(InvalidArgument, "multiples of 64 up to 65536",
                 set_fetch_tuning(WeightStream::int8, {wrong, TuningSource::fixed, ""}));
  }
  CHECK(fetch_distance(WeightStream::int8) == (FetchDistance{8192, 512}));
}

TEST("tuning: rows of panels are the kernel's own, or two at least") {
  const Kept kept;
  CHECK_EQ(panel_tuning(PackedTernary::t2).rows, 0);
  CHECK_EQ(line_rows(PackedTernary::t2, 5), 5);
  CHECK(describe_tuning().find("panels_") == std::string::npos);
  set_panel_tuning(PackedTernary::t2, {9, TuningSource::fixed, "a test"});
  CHECK_EQ(line_rows(PackedTernary::t2, 5), 8);
  CHECK_EQ(line_rows(PackedTernary::t1_6, 5), 5);
  for (const int32_t wrong : {-1, 1, 1025}) {
    CHECK_THROWS(InvalidArgument, "expected 0 or 2 to 1024 rows",
                 set_panel_tuning(PackedTernary::t2, {wrong, TuningSource::fixed, ""}));
  }
  CHECK(describe_tuning().ends_with("; panels_t2 9 rows (a test)"));
  CHECK(parse_panel_rows("0") == 0 && parse_panel_rows("2") == 2);
  CHECK(parse_panel_rows("1024") == 1024);
  for (const char* wrong : {"", "1", "1025", "-2", "9 ", "a", "99999999999"}) {
    CHECK(!parse_panel_rows(wrong));
  }
}

TEST("tuning: distances are parsed strictly") {
  CHECK(parse_fetch_distance("8192/512") == (FetchDistance{8192, 512}));
  CHECK(parse_fetch_distance("0/0") == (FetchDistance{0, 0}));
  for (const char* wrong : {"", "8192", "8192/", "/512", "8192/512 ", "a/b", "1/0", "-64/0",
                            "99999999999/0", "65600/0"}) {
    CHECK(!parse_fetch_distance(wrong));
  }
}

TEST("tuning: no distance changes a bit, to the ends of the weights and beyond") {
  const Kept kept;
  for (const Isa isa : available_isas()) {
    for (const WeightStream stream : kWeightStreams) {
      constexpr DType kTypes[] = {DType::q4_0, DType::tq2_0, DType::f16};
      constexpr Arithmetic kArithmetics[] = {Arithmetic::int8, Arithmetic::int8_token,
                                             Arithmetic::f32};
      const auto at = static_cast<size_t>(stream);
      const bool ternary = stream == WeightStream::ternary;
      const PackedBuffer weight =
          random_weight(kTypes[at], 150, 512, ternary ? TernaryForm::t2 : TernaryForm::u4);
      const Arithmetic arithmetic = kArithmetics[at];
      for (const int64_t rows : {1, 2, 3}) {
        set_fetch_tuning(stream, {{0, 0}, TuningSource::fixed, "a test"});
        const std::vector<float> expected = multiply(weight.view, arithmetic, rows, isa);
        for (const FetchDistance distance :
             {FetchDistance{64, 0}, {0, 64}, {65536, 65536}, {8192, 512}}) {
          set_fetch_tuning(stream, {distance, TuningSource::fixed, "a test"});
          CHECK(same_bits(multiply(weight.view, arithmetic, rows, isa), expected));
        }
      }
    }
  }
}

TEST("tuning: a measurement chooses for streams that are long enough, and puts back what was") {
  const Kept kept;
  ThreadPool pool(2);
  const PackedBuffer small = random_weight(DType::q4_0, 64, 256, TernaryForm::u4);
  CHECK(!weights::measure_fetch(WeightStream::int8, {&small.view, 1}, pool, current_target()));
  const PackedBuffer large = random_weight(DType::q4_0, 8192, 2560, TernaryForm::u4);
  CHECK(!weights::measure_fetch(WeightStream::ternary, {&large.view, 1}, pool, current_target()));
  const FetchTuning before = fetch_tuning(WeightStream::int8);
  const auto found =
      weights::measure_fetch(WeightStream::int8, {&large.view, 1}, pool, current_target());
  CHECK(found && found->source == TuningSource::measured);
  CHECK(found->reason.starts_with("measured: "));
  CHECK(fetch_distance(WeightStream::int8) == before.distance);
}

TEST("tuning: lines and panels are timed, and what was is put back") {
  const Kept kept;
  ThreadPool pool(1);
  const PackedBuffer small = random_weight(DType::tq2_0, 64, 256, TernaryForm::t2);
  CHECK(!weights::measure_panels(PackedTernary::t2, {&small.view, 1}, pool, current_target()));
  const PackedBuffer large = random_weight(DType::tq2_0, 16384, 2560, TernaryForm::t2);
  CHECK(!weights::measure_panels(PackedTernary::t1_6, {&large.view, 1}, pool, current_target()));
  set_panel_tuning(PackedTernary::t2, {5, TuningSource::guessed, "a test"});
  const auto found =
      weights::measure_panels(PackedTernary::t2, {&large.view, 1}, pool, current_target());
  CHECK(found && found->source == TuningSource::measured);
  CHECK(found->rows >= 2 && found->rows <= 129);
  CHECK(found->reason.starts_with("measured: "));
  CHECK_EQ(panel_tuning(PackedTernary::t2).rows, 5);
}

TEST("tuning: what was measured is kept and read again; damage costs a new measurement") {
  const Kept kept;
  const Folder folder;
  const FetchTuning tuning = {{4096, 512}, TuningSource::measured, "measured: 1.0 GB/s"};
  weights::TuningFile file(folder.path(), Isa::avx2);
  CHECK(!file.find(WeightStream::int8));
  file.put(WeightStream::int8, tuning);
  file.put(PackedTernary::t1_6, {6, TuningSource::measured, "measured: so"});
  CHECK_EQ(file.save(), "");
  CHECK(folder.file().ends_with("-avx2.txt"));
  const auto again = weights::TuningFile(folder.path(), Isa::avx2).find(WeightStream::int8);
  CHECK(again && again->distance == tuning.distance && again->reason == tuning.reason);
  const auto panels = weights::TuningFile(folder.path(), Isa::avx2).find(PackedTernary::t1_6);
  CHECK(panels && panels->rows == 6 && panels->reason == "measured: so");
  CHECK(!weights::TuningFile(folder.path(), Isa::avx2).find(PackedTernary::t2));
  CHECK(!weights::TuningFile(folder.path(), Isa::portable).find(WeightStream::int8));

  const std::string good = read(folder.file());
  for (const std::string& damaged :
       {std::string(), std::string("effinfer tuning 2\nint8 64/0 x\n"), good + "int8\n",
        good + "int8 1/2 x\n", good + "other 64/0 x\n", good + "panels_t2 1 x\n",
        std::string(5000, 'x')}) {
    std::ofstream(folder.file()) << damaged;
    CHECK(!weights::TuningFile(folder.path(), Isa::avx2).find(WeightStream::int8));
  }
}

TEST("tuning: what was kept is used again without a model, but for what is fixed") {
  const Kept kept;
  const Folder folder;
  weights::TuningFile file(folder.path(), current_isa());
  file.put(WeightStream::int8, {{2048, 64}, TuningSource::measured, "measured: so"});
  file.put(WeightStream::dense, {{4096, 64}, TuningSource::measured, "measured: so"});
  CHECK_EQ(file.save(), "");
  set_fetch_tuning(WeightStream::int8, {{512, 0}, TuningSource::known, "a test"});
  set_fetch_tuning(WeightStream::ternary, {{512, 0}, TuningSource::known, "a test"});
  set_fetch_tuning(WeightStream::dense, {{512, 0}, TuningSource::fixed, "a test"});
  recall_tuning(folder.path());
  CHECK(fetch_distance(WeightStream::int8) == (FetchDistance{2048, 64}));
  CHECK(fetch_tuning(WeightStream::int8).source == TuningSource::measured);
  CHECK(fetch_distance(WeightStream::ternary) == (FetchDistance{512, 0}));
  CHECK(fetch_distance(WeightStream::dense) == (FetchDistance{512, 0}));
  recall_tuning(folder.path() + "/none");
  CHECK(fetch_distance(WeightStream::int8) == (FetchDistance{2048, 64}));
}

TEST("tuning: what is no file is not waited for") {
  const Folder folder;
  const FetchTuning tuning = {{4096, 0}, TuningSource::measured, "measured: 1.0 GB/s"};
  weights::TuningFile file(folder.path(), Isa::avx2);
  file.put(WeightStream::int8, tuning);
  CHECK_EQ(file.save(), "");
  const std::string path = folder.file();
  fs::remove(path);
  CHECK_EQ(mkfifo(path.c_str(), 0600), 0);
  CHECK(!weights::TuningFile(folder.path(), Isa::avx2).find(WeightStream::int8));
  fs::remove(path);
  fs::create_directory(path);
  CHECK(!weights::TuningFile(folder.path(), Isa::avx2).find(WeightStream::int8));
  CHECK(file.save().starts_with("[tuning] "));
}

TEST("tuning: two loads at a time measure one after the other") {
  const Kept kept;
  const Folder folder;
  const PackedBuffer large = random_weight(DType::q4_0, 8192, 2560, TernaryForm::u4);
  set_fetch_tuning(WeightStream::int8, {{512, 0}, TuningSource::guessed, "a test"});
  std::string troubles[2];
  const auto load = [&](int i) {
    ThreadPool pool(1);
    troubles[i] = weights::tune({&large.view, 1}, pool, current_target(), folder.path());
  };
  std::thread other(load, 1);
  load(0);
  other.join();
  for (const std::string& trouble : troubles) CHECK_EQ(trouble, "");
  const auto kept_on_disk =
      weights::TuningFile(folder.path(), current_isa()).find(WeightStream::int8);
  CHECK(kept_on_disk && kept_on_disk->distance == fetch_distance(WeightStream::int8));
}

TEST("tuning: a folder that cannot be written says why, and the measurement is used") {
  const Kept kept;
  const Folder folder;
  std::ofstream(folder.path() + "/file") << "x";
  ThreadPool pool(1);
  const PackedBuffer large = random_weight(DType::q4_0, 8192, 2560, TernaryForm::u4);
  set_fetch_tuning(WeightStream::int8, {{512, 0}, TuningSource::guessed, "a test"});
  const std::string trouble =
      weights::tune({&large.view, 1}, pool, current_target(), folder.path() + "/file/below");
  CHECK(trouble.starts_with("[tuning] "));
  CHECK(fetch_tuning(WeightStream::int8).source == TuningSource::measured);
  // Once is enough in a process.
  CHECK_EQ(weights::tune({&large.view, 1}, pool, current_target(), folder.path()), "");
  CHECK_EQ(folder.file(), folder.path() + "/file");
}

TEST("tuning: what is fixed stays") {
  const Kept kept;
  const Folder folder;
  ThreadPool pool(1);
  const FetchTuning fixed = {{64, 64}, TuningSource::fixed, "a test"};
  for (const WeightStream stream : kWeightStreams) set_fetch_tuning(stream, fixed);
  for (const PackedTernary packed : kPackedTernary) {
    set_panel_tuning(packed, {7, TuningSource::fixed, "a test"});
  }
  calibrate(pool, folder.path());
  for (const WeightStream stream : kWeightStreams) CHECK(fetch_distance(stream) == fixed.distance);
  for (const PackedTernary packed : kPackedTernary) CHECK_EQ(panel_tuning(packed).rows, 7);
}

}  // namespace

CHECK_MAIN()
