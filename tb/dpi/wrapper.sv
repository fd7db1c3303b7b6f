// Passes a unit's ports through for cycle-by-cycle benches; while `fast` is high, its streams are fed from and emptied
// into NumPy buffers instead, without a wake-up of Python until `done`.
`timescale 1ns / 1ps
module tb #(
    parameter WI = 8,   // bits of the input payload
    parameter WO = 8,   // bits of the output payload
    parameter BI = 8,   // the same, rounded up to whole bytes
    parameter BO = 8
) (
    input  wire          clk,
    input  wire          rst,
    input  wire          fast,
    input  wire          i__valid,
    input  wire [WI-1:0] i__payload,
    output wire          i__ready,
    output wire          o__valid,
    output wire [WO-1:0] o__payload,
    input  wire          o__ready,
`ifdef TABLE
    input  wire          table__valid,
    input  wire [`TABLE-1:0] table__payload,
    output wire          table__ready,
`endif
    output reg           done,
    output reg  [63:0]   cycles
);
  import "DPI-C" function void stream_get(output bit valid, output bit [BI-1:0] beat);
  import "DPI-C" function bit stream_put(input bit [BO-1:0] beat);
  import "DPI-C" function bit stream_ready();

  reg valid = 0, ready = 0;
  bit next_valid;
  bit [BI-1:0] beat, next_beat;
  wire i_valid = fast ? valid : i__valid;
  wire [WI-1:0] i_payload = fast ? beat[WI-1:0] : i__payload;
  wire o_ready = fast ? ready : o__ready;

  `UNIT dut (
      .clk(clk), .rst(rst),
      .i__valid(i_valid), .i__payload(i_payload), .i__ready(i__ready),
`ifdef TABLE
      .table__valid(table__valid), .table__payload(table__payload), .table__ready(table__ready),
`endif
      .o__valid(o__valid), .o__payload(o__payload), .o__ready(o_ready)
  );

  // From the cycle after the first accepted beat on; the host adds the first.
  reg started = 0;
  always @(posedge clk) begin
    if (rst | !fast) begin
      valid <= 0; ready <= 0; done <= 0; started <= 0; cycles <= 0;
    end else begin
      ready <= stream_ready();
      if (i__ready | !valid) begin
        stream_get(next_valid, next_beat);
        valid <= next_valid;
        if (next_valid) beat <= next_beat;
      end
      if (started & !done) cycles <= cycles + 1;
      if (valid & i__ready) started <= 1;
      if (o__valid & o_ready)
        if (stream_put(BO'(o__payload))) done <= 1;
    end
  end
endmodule
